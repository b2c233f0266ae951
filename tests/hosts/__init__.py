"""Several hosts: network namespaces that the tests make."""
