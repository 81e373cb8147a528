"""From a teacher to a linearized model, and from stage folders back to one."""
