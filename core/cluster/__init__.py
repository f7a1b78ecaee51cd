"""Hardware as data: devices, links, paths, meshes, collectives, and the catalogue."""
