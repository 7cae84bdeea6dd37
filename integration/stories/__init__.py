"""What users expect, as ten stories: each criterion with what proves it, and whether it holds."""
