"""Tests of reading and chunking."""
