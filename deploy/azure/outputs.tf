output "manager_url" {
  value = "https://${azurerm_public_ip.manager.ip_address}:8750"
}

output "next" {
  description = "The two steps that remain."
  value       = <<-TEXT
    scp ${var.wheel} varuna@${azurerm_public_ip.manager.ip_address}:/tmp/
    ssh varuna@${azurerm_public_ip.manager.ip_address} sudo varuna-install /tmp/${basename(var.wheel)}
  TEXT
}
