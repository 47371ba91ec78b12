"""Measurements of the engine; the files are scripts, gpu/ is a package."""
