"""A batch on its way into a pipeline: microbatches, shapes, and whether ranks were given the same one."""
