"""The thin Dagster shell: assets, checks, resources, automation."""
