"""The HTTP API: TGI's and OpenAI's routes over one engine. Imports no torch; the engine comes in as `EngineClient`."""
