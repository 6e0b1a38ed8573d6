"""SpecInfer's command line, its Python interface, and the tables of its paper."""
