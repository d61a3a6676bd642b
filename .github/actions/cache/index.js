// GitHub gives these to actions only, and `docker buildx` reads them in the environment of its command:
// without them it leaves the cache out and says nothing. Here, and not in somebody else's action,
// because the job that pushes needs them too.
const { appendFileSync } = require("node:fs");

const given = ["ACTIONS_CACHE_SERVICE_V2", "ACTIONS_CACHE_URL", "ACTIONS_RESULTS_URL", "ACTIONS_RUNTIME_TOKEN"]
  .filter((name) => process.env[name]);
if (!given.includes("ACTIONS_RUNTIME_TOKEN")) throw new Error("the runner gives no ACTIONS_RUNTIME_TOKEN");
for (const name of given) appendFileSync(process.env.GITHUB_ENV, `${name}=${process.env[name]}\n`);
