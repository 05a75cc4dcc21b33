"""What people look at: writers of reports, each from the plain data of a matrix.json."""
