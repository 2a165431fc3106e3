"""Plain data that crosses rooms: messages, requests, completions, records, samples."""
