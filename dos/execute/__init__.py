"""How a step happens: one interpreter over a plan, and the backends that it runs on."""
