// The AWS SDK for JavaScript, as Lambda's Node.js runtime provides it, for functions of the local
// AWS: enough for the custom resources of the CDK. Node.js loads this file before the function.
//
// `require("@aws-sdk/client-s3")` and its like give clients whose calls go through boto3
// (aws_sdk_bridge.py): both SDKs name operations and parameters after the same service models.
// Only values that JSON knows can be passed; dates and bytes can be received.
"use strict";

const { spawn, spawnSync } = require("child_process");
const Module = require("module");
const path = require("path");

const PYTHON = process.env.REHEARSAL_PYTHON;
const BRIDGE = path.join(__dirname, "aws_sdk_bridge.py");

function revive(_key, value) {
  if (value && typeof value.$date === "string") return new Date(value.$date);
  if (value && typeof value.$bytes === "string") return Buffer.from(value.$bytes, "base64");
  return value;
}

function call(service, operation, input) {
  return new Promise((resolve, reject) => {
    const bridge = spawn(PYTHON, [BRIDGE, service, operation], {
      stdio: ["pipe", "pipe", "inherit"],
    });
    let text = "";
    bridge.stdout.on("data", (chunk) => (text += chunk));
    bridge.on("error", reject);
    bridge.on("close", (code) => {
      if (code !== 0) return reject(new Error(`${service}.${operation}: the bridge to boto3 failed`));
      const { error, output } = JSON.parse(text, revive);
      if (!error) return resolve(output);
      const thrown = Object.assign(new Error(error.message), { name: error.name });
      thrown.$metadata = { httpStatusCode: error.status };
      return reject(thrown);
    });
    bridge.stdin.end(JSON.stringify(input || {}));
  });
}

function load(service) {
  const answer = spawnSync(PYTHON, [BRIDGE, service], { encoding: "utf8" });
  if (answer.status !== 0) throw new Error(`@aws-sdk/client-${service}: ${answer.stderr}`);
  const { id, operations } = JSON.parse(answer.stdout);
  class Client {
    constructor(config) {
      // In the SDK too, settings of a client are functions. AwsCustomResource asks for the region.
      this.config = { ...config, region: async () => process.env.AWS_REGION };
    }
    send(command) {
      return call(service, command.operation, command.input);
    }
    destroy() {}
  }
  class Aggregated extends Client {}
  const exported = { [`${id}Client`]: Client, [id]: Aggregated };
  for (const operation of operations) {
    exported[`${operation}Command`] = class {
      constructor(input) {
        this.operation = operation;
        this.input = input;
      }
    };
    Aggregated.prototype[operation[0].toLowerCase() + operation.slice(1)] = function (input) {
      return call(service, operation, input);
    };
  }
  return exported;
}

const loaded = new Map();
const stock = Module._load;
Module._load = function (request, parent, isMain) {
  const found = /^@aws-sdk\/client-([a-z0-9-]+)$/.exec(request);
  if (!found) return stock.call(this, request, parent, isMain);
  if (!loaded.has(found[1])) loaded.set(found[1], load(found[1]));
  return loaded.get(found[1]);
};
