// What the scripts of this folder have in common: a browser whose microphone hears a recording, and pages that are watched.
// FLOW_TEST_CHROMIUM is the browser (`chromium`); below FLOW_TEST_PICTURES, where it is set, pictures of the pages are saved.
// Needs the package playwright-core in the folder in which a script is run.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(join(process.cwd(), "package.json")));
const { chromium } = require("playwright-core");
const pictures = process.env.FLOW_TEST_PICTURES;
const wanted = process.env.FLOW_TEST_CHROMIUM ?? "chromium";
const executablePath = wanted.includes("/") ? wanted : execFileSync("which", [wanted], { encoding: "utf8" }).trim();
const PATIENCE = 120_000;

// What no page may do, and did: print errors (a policy that is broken is one), or ask another server.
export const faults = [];

// A browser whose microphone hears a WAV file, once. `more` are further arguments of it.
export function launch(recording, ...more) {
  const args = [
    "--no-sandbox",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    `--use-file-for-fake-audio-capture=${recording}%noloop`,
  ];
  return chromium.launch({ executablePath, args: [...args, ...more] });
}

// A page in a context of its own, at `url`; what it must not do is added to `faults`.
export async function open(browser, url, options) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(PATIENCE);
  const page = await context.newPage();
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
  page.on("request", (request) => {
    const { protocol, origin } = new URL(request.url());
    if (protocol.startsWith("http") && origin !== new URL(url).origin) {
      faults.push(`it asks ${request.url()}`);
    }
  });
  await page.goto(url);
  return page;
}

export async function picture(page, name) {
  if (pictures) {
    await page.screenshot({ path: join(pictures, `${name}.png`), fullPage: true });
  }
}

// Nothing is wider than the window.
export async function fits(page, name) {
  const [content, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(content <= window, `${name}: the page is ${content} pixels wide in a window of ${window}`);
}

// In the page: whether so many words are there that will not change. Words that may be others after "Stop" do not count.
export function wordsSaid(least) {
  const said = document.querySelector("#transcript").cloneNode(true);
  said.querySelectorAll(".partial, .head").forEach((part) => part.remove());
  return said.textContent.trim().split(/\s+/).length >= least;
}
