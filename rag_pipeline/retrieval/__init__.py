"""A query to evidence; `pipeline` has the steps in order."""
