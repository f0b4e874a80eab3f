"""The record of each lookup and of what each session was given: database, spool, redaction."""
