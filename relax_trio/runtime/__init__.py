"""The nursery tree: engine, work, Groups, places, Sessions, requests, attempts."""
