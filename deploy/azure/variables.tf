variable "resource_group" {
  description = "An existing resource group: everything is made in it."
  type        = string
}

variable "name" {
  description = "Prefix of the names of what is made, and the name of the spot scale set."
  type        = string
  default     = "varuna"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,15}$", var.name))
    error_message = "name: small letters, digits and hyphens, 16 at most, the first a letter."
  }
}

variable "ssh_public_key" {
  description = "For the administrator of the manager and of the spot VMs."
  type        = string
}

variable "allowed_cidrs" {
  description = "Addresses that may reach the manager's HTTPS port and ssh, such as your office's."
  type        = list(string)

  validation {
    condition     = length(var.allowed_cidrs) > 0 && !contains(var.allowed_cidrs, "0.0.0.0/0")
    error_message = "allowed_cidrs: name the networks that you work from; the whole internet is not one."
  }
}

variable "wheel" {
  description = "Path of varuna_spot-<version>-py3-none-any.whl, as `pip wheel --no-deps .` makes it."
  type        = string
}

variable "manager_size" {
  description = "Size of the manager's VM, which is not a spot VM: 2 cores serve 10,000 agents."
  type        = string
  default     = "Standard_D2s_v5"
}

variable "sizes" {
  description = "Sizes of the spot VMs in order of preference."
  type = list(object({
    name              = string
    gpus              = number
    device_memory_gib = optional(number)
    zones             = optional(list(string), [])
  }))
  default = [{ name = "Standard_NC24ads_A100_v4", gpus = 1, device_memory_gib = 80 }]
}

variable "image" {
  description = "publisher:offer:sku:version of the spot VMs' image, with NVIDIA's driver."
  type        = string
  default     = "microsoft-dsvm:ubuntu-hpc:2204:latest"
}

variable "max_vms" {
  description = "The fleet never has more."
  type        = number
}

variable "max_cost_per_hour" {
  description = "The fleet never costs more, in US dollars."
  type        = number
}
