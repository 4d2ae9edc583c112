output "manager_url" {
  description = "VARUNA_MANAGER_URL for the varuna command."
  value       = "https://${azurerm_public_ip.manager.ip_address}:8750"
}

output "checkpoints" {
  description = "Where jobs that name no place have their checkpoints."
  value       = "${azurerm_storage_account.checkpoints.primary_blob_endpoint}${azurerm_storage_container.checkpoints.name}/jobs"
}

output "next" {
  description = "The steps that remain."
  value       = <<-TEXT
    scp ${var.wheel} ${dirname(var.wheel)}/constraints.txt ${local.admin}@${azurerm_public_ip.manager.ip_address}:
    ssh ${local.admin}@${azurerm_public_ip.manager.ip_address} sudo varuna-install ${basename(var.wheel)} constraints.txt
    ssh ${local.admin}@${azurerm_public_ip.manager.ip_address} sudo cat /var/lib/varuna-manager/admin-token
    ssh ${local.admin}@${azurerm_public_ip.manager.ip_address} sudo cat /var/lib/varuna-manager/pki/ca.pem > ca.pem
  TEXT
}
