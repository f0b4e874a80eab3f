"""Programs to read and run that show how the project is used."""
