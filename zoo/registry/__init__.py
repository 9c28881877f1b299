"""From a name to a network: what names stand for, networks with weights, preprocessing. Imports no torch by itself."""
