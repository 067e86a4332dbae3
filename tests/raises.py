"""A module that cannot be imported, as a project's own may be."""

raise RuntimeError("secretmark")
