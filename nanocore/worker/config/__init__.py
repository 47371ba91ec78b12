"""What a model folder's JSON files say: config.json by family, and generation_config.json."""
