"""What is tested: models, explicit expectations, the matrix, known failures."""
