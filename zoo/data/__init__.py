"""Reading of training data: class folders, shards, label maps, transforms, samplers and loaders."""
