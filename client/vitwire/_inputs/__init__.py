"""Users' inputs as items: outputs of processors, pictures, files."""
