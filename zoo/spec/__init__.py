"""One description of a network: architectures, options per family, the spec; and what reads JSON strictly."""
