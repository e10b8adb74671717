"""Registries of OCI images: shared stores in their repositories, and export to images."""
