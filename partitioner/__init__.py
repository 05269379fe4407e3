"""Who does what: shards, stages and plans."""
