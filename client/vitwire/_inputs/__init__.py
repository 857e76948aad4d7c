"""What users pass, as items: outputs of processors, pictures, files."""
