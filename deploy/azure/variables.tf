variable "subscription_id" {
  description = "The subscription in which all this is."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", lower(var.subscription_id)))
    error_message = "subscription_id: as az account show --query id prints it."
  }
}

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
  description = "For the administrator (azureuser) of the manager and of the spot VMs."
  type        = string

  validation {
    condition     = can(regex("^(ssh-rsa|ssh-ed25519) ", var.ssh_public_key))
    error_message = "ssh_public_key: the text of a public key, such as file(\"~/.ssh/id_ed25519.pub\")."
  }
}

variable "allowed_cidrs" {
  description = "Addresses that may reach the manager's HTTPS port and ssh, such as your office's."
  type        = list(string)

  validation {
    condition     = length(var.allowed_cidrs) > 0 && alltrue([for cidr in var.allowed_cidrs : can(cidrhost(cidr, 0))])
    error_message = "allowed_cidrs: at least one network, such as 203.0.113.0/24."
  }
  validation {
    condition     = !contains(var.allowed_cidrs, "0.0.0.0/0")
    error_message = "allowed_cidrs: name the networks that you work from; the whole internet is not one."
  }
}

variable "wheel" {
  description = "Path of varuna_spot-<version>-py3-none-any.whl, as `make wheel` makes it, with constraints.txt beside it."
  type        = string
  default     = "../../dist/varuna_spot-0.1.0-py3-none-any.whl"

  validation {
    condition     = can(regex("varuna_spot-[^/]+\\.whl$", var.wheel))
    error_message = "wheel: the path of varuna_spot-<version>-py3-none-any.whl (make wheel)."
  }
}

variable "manager_size" {
  description = "Size of the manager's VM, which is not a spot VM: 2 cores serve 10,000 agents."
  type        = string
  default     = "Standard_D2s_v5"
}

variable "sizes" {
  description = "Sizes of the spot VMs in order of preference; price_per_hour: for when Azure does not tell its spot price."
  type = list(object({
    name              = string
    gpus              = number
    device_memory_gib = optional(number)
    gpu_type          = optional(string)
    zones             = optional(list(string), [])
    price_per_hour    = optional(number)

    accelerated_networking = optional(bool)
  }))
  default = [{ name = "Standard_NC24ads_A100_v4", gpus = 1, device_memory_gib = 80 }]

  validation {
    condition     = length(var.sizes) > 0 && alltrue([for size in var.sizes : size.gpus >= 1])
    error_message = "sizes: at least one, each with one GPU or more."
  }
  validation {
    condition     = length(distinct([for size in var.sizes : length(size.zones) > 0])) <= 1
    error_message = "sizes: give every size its zones, or none any. A scale set takes VMs of zones only, or VMs without."
  }
}

variable "image" {
  description = "publisher:offer:sku:version of the spot VMs' image, with NVIDIA's driver and Python 3.11 or newer; or an image's id."
  type        = string
  default     = "microsoft-dsvm:ubuntu-hpc:2404:latest"

  validation {
    condition     = startswith(var.image, "/") || length(split(":", var.image)) == 4
    error_message = "image: publisher:offer:sku:version, or a resource id that starts with /."
  }
}

variable "read_subscription" {
  description = "Let the manager read the whole subscription (Reader): Azure then tells it eviction rates too. Spot prices need no such right."
  type        = bool
  default     = false
}

variable "secrets_vault_id" {
  description = "Id of an Azure Key Vault for the secrets of jobs alone (az keyvault show --query id): the manager may read all its secrets."
  type        = string
  default     = null

  validation {
    condition     = var.secrets_vault_id == null || can(regex("(?i)^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\\.KeyVault/vaults/[a-z0-9-]{3,24}$", var.secrets_vault_id))
    error_message = "secrets_vault_id: /subscriptions/.../providers/Microsoft.KeyVault/vaults/NAME, as az keyvault show --query id prints it."
  }
}

variable "max_vms" {
  description = "The fleet never has more."
  type        = number

  validation {
    condition     = var.max_vms >= 1 && floor(var.max_vms) == var.max_vms
    error_message = "max_vms: a whole number, 1 or more."
  }
}

variable "max_cost_per_hour" {
  description = "No VM is asked for that would make the fleet cost more, in US dollars."
  type        = number

  validation {
    condition     = var.max_cost_per_hour > 0
    error_message = "max_cost_per_hour: more than 0."
  }
}
