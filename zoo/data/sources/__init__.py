"""Sources of images: class folders, shards, and shards on a server."""
