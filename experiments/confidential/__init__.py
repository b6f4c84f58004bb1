"""Studies of confidential prompting: cost beside other systems, obfuscation, attacks."""
