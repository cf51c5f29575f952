"""What the tests share lies here, test modules beside it: see README.md."""
