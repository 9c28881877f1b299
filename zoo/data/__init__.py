"""Images on their way into a network: folders, transforms, samplers, loaders and the bundled sample."""
