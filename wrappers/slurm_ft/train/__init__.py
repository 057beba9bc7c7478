"""Reference fine-tuning program: small models on data that it makes itself."""
