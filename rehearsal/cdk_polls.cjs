// Loaded into the CDK command line by rehearsal/cdk.py. It looks every 5 seconds whether a stack is
// made, and every 2 for its events; the local AWS makes one in less, and has nothing to throttle.
const wait = globalThis.setTimeout;
globalThis.setTimeout = (call, ms, ...given) =>
  wait(call, ms === 5000 || ms === 2000 ? ms / 20 : ms, ...given);
