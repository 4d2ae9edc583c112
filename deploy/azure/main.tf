# What a fleet on Azure needs: a network, a manager, checkpoint storage, and two identities with as few rights as will do.
# The spot VMs are not here: the manager makes them, in the empty scale set below, and gives them back.

terraform {
  required_version = ">= 1.5"
  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = "~> 4.0"
    }
    random = {
      source  = "hashicorp/random"
      version = "~> 3.6"
    }
  }
}

provider "azurerm" {
  features {}
  subscription_id     = var.subscription_id
  storage_use_azuread = true # the storage account has no keys
}

data "azurerm_resource_group" "here" {
  name = var.resource_group
}

locals {
  location = data.azurerm_resource_group.here.location
  tags     = { "varuna-fleet" = var.name }
  zones    = distinct(flatten([for size in var.sizes : size.zones]))
  admin    = "azureuser" # not varuna: that is whom the manager runs as, who may nothing
}

# ---------------------------------------------------------------- network

resource "azurerm_virtual_network" "net" {
  name                = "${var.name}-net"
  resource_group_name = var.resource_group
  location            = local.location
  address_space       = ["10.20.0.0/16"]
  tags                = local.tags
}

resource "azurerm_subnet" "manager" {
  name                 = "manager"
  resource_group_name  = var.resource_group
  virtual_network_name = azurerm_virtual_network.net.name
  address_prefixes     = ["10.20.0.0/24"]
}

resource "azurerm_subnet" "vms" {
  name                 = "vms"
  resource_group_name  = var.resource_group
  virtual_network_name = azurerm_virtual_network.net.name
  address_prefixes     = ["10.20.16.0/20"]
  service_endpoints    = ["Microsoft.Storage"]
}

resource "azurerm_public_ip" "nat" {
  name                = "${var.name}-nat"
  resource_group_name = var.resource_group
  location            = local.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway" "nat" {
  name                = "${var.name}-nat"
  resource_group_name = var.resource_group
  location            = local.location
  sku_name            = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway_public_ip_association" "nat" {
  nat_gateway_id       = azurerm_nat_gateway.nat.id
  public_ip_address_id = azurerm_public_ip.nat.id
}

resource "azurerm_subnet_nat_gateway_association" "vms" {
  subnet_id      = azurerm_subnet.vms.id
  nat_gateway_id = azurerm_nat_gateway.nat.id
}

resource "azurerm_network_security_group" "manager" {
  name                = "${var.name}-manager"
  resource_group_name = var.resource_group
  location            = local.location
  tags                = local.tags

  security_rule {
    name                       = "people"
    priority                   = 100
    direction                  = "Inbound"
    access                     = "Allow"
    protocol                   = "Tcp"
    source_address_prefixes    = var.allowed_cidrs
    source_port_range          = "*"
    destination_address_prefix = "*"
    destination_port_ranges    = ["22", "8750"]
  }

  security_rule {
    name                       = "agents"
    priority                   = 110
    direction                  = "Inbound"
    access                     = "Allow"
    protocol                   = "Tcp"
    source_address_prefix      = azurerm_subnet.vms.address_prefixes[0]
    source_port_range          = "*"
    destination_address_prefix = "*"
    destination_port_ranges    = ["8750", "8751"]
  }

  security_rule {
    name                       = "nobody-else"
    priority                   = 4000
    direction                  = "Inbound"
    access                     = "Deny"
    protocol                   = "*"
    source_address_prefix      = "*"
    source_port_range          = "*"
    destination_address_prefix = "*"
    destination_port_range     = "*"
  }
}

resource "azurerm_network_security_group" "vms" {
  name                = "${var.name}-vms"
  resource_group_name = var.resource_group
  location            = local.location
  tags                = local.tags

  # Workers of one job talk to each other on ports of their own choice.
  security_rule {
    name                       = "each-other"
    priority                   = 100
    direction                  = "Inbound"
    access                     = "Allow"
    protocol                   = "Tcp"
    source_address_prefix      = azurerm_subnet.vms.address_prefixes[0]
    source_port_range          = "*"
    destination_address_prefix = azurerm_subnet.vms.address_prefixes[0]
    destination_port_range     = "*"
  }

  security_rule {
    name                       = "ssh-through-the-manager"
    priority                   = 110
    direction                  = "Inbound"
    access                     = "Allow"
    protocol                   = "Tcp"
    source_address_prefix      = azurerm_subnet.manager.address_prefixes[0]
    source_port_range          = "*"
    destination_address_prefix = "*"
    destination_port_range     = "22"
  }

  security_rule {
    name                       = "nobody-else"
    priority                   = 4000
    direction                  = "Inbound"
    access                     = "Deny"
    protocol                   = "*"
    source_address_prefix      = "*"
    source_port_range          = "*"
    destination_address_prefix = "*"
    destination_port_range     = "*"
  }
}

resource "azurerm_subnet_network_security_group_association" "manager" {
  subnet_id                 = azurerm_subnet.manager.id
  network_security_group_id = azurerm_network_security_group.manager.id
}

resource "azurerm_subnet_network_security_group_association" "vms" {
  subnet_id                 = azurerm_subnet.vms.id
  network_security_group_id = azurerm_network_security_group.vms.id
}

# ---------------------------------------------------------------- checkpoints

resource "random_string" "storage" {
  length  = 8
  special = false
  upper   = false
}

resource "azurerm_storage_account" "checkpoints" {
  name                            = "${replace(var.name, "-", "")}${random_string.storage.result}"
  resource_group_name             = var.resource_group
  location                        = local.location
  account_tier                    = "Standard"
  account_replication_type        = "LRS"
  min_tls_version                 = "TLS1_2"
  shared_access_key_enabled       = false
  allow_nested_items_to_be_public = false
  tags                            = local.tags
}

resource "azurerm_storage_container" "checkpoints" {
  name               = "checkpoints"
  storage_account_id = azurerm_storage_account.checkpoints.id
}

# ---------------------------------------------------------------- the fleet

# The varuna-fleet tag is how the manager knows what is its own.
resource "azurerm_orchestrated_virtual_machine_scale_set" "fleet" {
  name                        = var.name
  resource_group_name         = var.resource_group
  location                    = local.location
  platform_fault_domain_count = 1
  single_placement_group      = false
  zones                       = length(local.zones) > 0 ? local.zones : null
  tags                        = local.tags
}

# ---------------------------------------------------------------- who may do what

resource "azurerm_user_assigned_identity" "manager" {
  name                = "${var.name}-manager"
  resource_group_name = var.resource_group
  location            = local.location
  tags                = local.tags
}

resource "azurerm_user_assigned_identity" "vms" {
  name                = "${var.name}-vms"
  resource_group_name = var.resource_group
  location            = local.location
  tags                = local.tags
}

resource "azurerm_role_definition" "fleet" {
  name        = "${var.name} fleet (${var.resource_group})"
  scope       = data.azurerm_resource_group.here.id
  description = "Makes and deletes the spot VMs of one resource group."

  permissions {
    actions = [
      "Microsoft.Compute/virtualMachines/read",
      "Microsoft.Compute/virtualMachines/write",
      "Microsoft.Compute/virtualMachines/delete",
      "Microsoft.Compute/virtualMachines/simulateEviction/action",
      "Microsoft.Compute/virtualMachineScaleSets/read",
      "Microsoft.Compute/virtualMachineScaleSets/write",
      "Microsoft.Compute/virtualMachineScaleSets/delete/action",
      "Microsoft.Compute/disks/read",
      "Microsoft.Compute/disks/write",
      "Microsoft.Compute/disks/delete",
      "Microsoft.Compute/images/read",
      "Microsoft.Compute/galleries/images/read",
      "Microsoft.Compute/galleries/images/versions/read",
      "Microsoft.Network/networkInterfaces/read",
      "Microsoft.Network/networkInterfaces/write",
      "Microsoft.Network/networkInterfaces/join/action",
      "Microsoft.Network/networkInterfaces/delete",
      "Microsoft.Network/virtualNetworks/subnets/join/action",
      "Microsoft.Network/networkSecurityGroups/join/action",
      "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    ]
  }

  assignable_scopes = [data.azurerm_resource_group.here.id]
}

resource "azurerm_role_assignment" "fleet" {
  scope              = data.azurerm_resource_group.here.id
  role_definition_id = azurerm_role_definition.fleet.role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.manager.principal_id
}

# Resource Graph tells eviction rates only to who may read the subscription; its own right alone gives nothing.
resource "azurerm_role_assignment" "eviction_rates" {
  count                = var.read_subscription ? 1 : 0
  scope                = "/subscriptions/${var.subscription_id}"
  role_definition_name = "Reader"
  principal_id         = azurerm_user_assigned_identity.manager.principal_id
}

# Jobs name its secrets as vault:NAME: each of them is for whoever may submit jobs.
resource "azurerm_role_assignment" "secrets" {
  count                = var.secrets_vault_id == null ? 0 : 1
  scope                = var.secrets_vault_id
  role_definition_name = "Key Vault Secrets User"
  principal_id         = azurerm_user_assigned_identity.manager.principal_id
}

resource "azurerm_role_assignment" "checkpoints" {
  for_each = {
    manager = azurerm_user_assigned_identity.manager.principal_id
    vms     = azurerm_user_assigned_identity.vms.principal_id
  }
  scope                = azurerm_storage_container.checkpoints.id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = each.value
}

# ---------------------------------------------------------------- manager

resource "azurerm_public_ip" "manager" {
  name                = "${var.name}-manager"
  resource_group_name = var.resource_group
  location            = local.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_network_interface" "manager" {
  name                = "${var.name}-manager"
  resource_group_name = var.resource_group
  location            = local.location
  tags                = local.tags

  ip_configuration {
    name                          = "first"
    subnet_id                     = azurerm_subnet.manager.id
    private_ip_address_allocation = "Static"
    private_ip_address            = "10.20.0.10"
    public_ip_address_id          = azurerm_public_ip.manager.id
  }
}

resource "azurerm_linux_virtual_machine" "manager" {
  name                  = "${var.name}-manager"
  resource_group_name   = var.resource_group
  location              = local.location
  size                  = var.manager_size
  admin_username        = local.admin
  network_interface_ids = [azurerm_network_interface.manager.id]
  tags                  = local.tags

  admin_ssh_key {
    username   = local.admin
    public_key = var.ssh_public_key
  }

  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.manager.id]
  }

  os_disk {
    caching              = "ReadWrite"
    storage_account_type = "Premium_LRS"
    disk_size_gb         = 64
  }

  source_image_reference {
    publisher = "Canonical"
    offer     = "ubuntu-24_04-lts"
    sku       = "server"
    version   = "latest"
  }

  custom_data = base64encode(templatefile("${path.module}/manager-cloud-init.yaml.tftpl", {
    service           = base64encode(file("${path.module}/../systemd/varuna-manager.service"))
    install           = base64encode(file("${path.module}/varuna-install.sh"))
    client_id         = azurerm_user_assigned_identity.manager.client_id
    private_ip        = azurerm_network_interface.manager.private_ip_address
    public_ip         = azurerm_public_ip.manager.ip_address
    checkpoint_url    = "abfss://${azurerm_storage_container.checkpoints.name}@${azurerm_storage_account.checkpoints.name}.dfs.core.windows.net/jobs"
    secrets_vault     = var.secrets_vault_id == null ? "" : "https://${basename(var.secrets_vault_id)}.vault.azure.net"
    max_vms           = var.max_vms
    max_cost_per_hour = var.max_cost_per_hour
    azure_settings = base64encode(yamlencode({
      subscription_id           = var.subscription_id
      resource_group            = var.resource_group
      location                  = local.location
      scale_set                 = azurerm_orchestrated_virtual_machine_scale_set.fleet.name
      sizes                     = [for size in var.sizes : { for key, value in size : key => value if value != null }]
      image                     = var.image
      subnet_id                 = azurerm_subnet.vms.id
      network_security_group_id = azurerm_network_security_group.vms.id
      identity_id               = azurerm_user_assigned_identity.vms.id
      admin_username            = local.admin
      ssh_public_key            = var.ssh_public_key
    }))
  }))

  # Made anew, it would lose the store: exchange the version with varuna-install, the settings in /etc/varuna.
  lifecycle {
    ignore_changes = [custom_data]
  }
}
