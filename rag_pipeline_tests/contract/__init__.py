"""One contract over every store that the project supports."""
