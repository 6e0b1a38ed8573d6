"""The bundled tiny models, and the recipe that makes them."""
