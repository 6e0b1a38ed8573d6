"""The bundled tiny models, and the recipe that creates them."""
