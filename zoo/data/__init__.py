"""What is read during training: class folders, shards, label maps, transforms, samplers and loaders."""
