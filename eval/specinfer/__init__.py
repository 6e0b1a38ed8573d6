"""SpecInfer: its flags, its Python interface, and its tables."""
