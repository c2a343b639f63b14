"""Pictures of what an emulated launch did and when; see ``smfree timeline``."""
