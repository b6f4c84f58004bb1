"""What InvisibleInk is compared with: as published, and corrected."""
