// What the clients for Node are asked, and the printing of rows of a Markdown table; see ../shared.py and ../run.py.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const [url, model] = process.argv.slice(2);
export const key = "none";
export const question = "What is the weather in Paris?";
export const maxTokens = 200;
export const Colour = z.object({ colour: z.enum(["red", "blue"]) });
export const Place = z.object({ city: z.enum(["Paris", "Rome"]) });

export class WeatherTool {
  cities = [];
  call = (place) => {
    this.cities.push(Place.parse(place).city);
    return "Sunny, 21 degrees";
  };
}

export function require(condition, about) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(about)}`);
}

export function requireText(text) {
  require(typeof text === "string" && text, text);
}

// Runs the checks, an object of functions by what they try. The exit status is 0 if all work.
export async function tryAll(name, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  for (const [what, check] of Object.entries(checks)) {
    let result = "works";
    try {
      await check();
    } catch (error) {
      process.exitCode = 1;
      result = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300).replaceAll("|", "\\|");
    }
    console.log(`| ${name} (Node) ${version} | ${what} | ${result} |`);
  }
}
