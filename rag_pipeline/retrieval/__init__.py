"""A query to candidates."""
