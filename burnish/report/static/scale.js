// The numbers behind a chart: what is in sight, smoothed, on which scale. Nothing here touches the page.

// Exponential moving average: what is one step old has the given weight, what is k steps old weight^k. So a curve that has a point every
// fifty steps is hardly smoothed by what smooths one that has a point a step. Divided by all weights: the first point is itself.
function smoothed(points, weight) {
  if (!(weight > 0)) return points;
  let sum = 0, norm = 0, last = null;
  return points.map(([x, y]) => {
    const past = last === null ? 0 : weight ** (x - last);
    sum = past * sum + y;
    norm = past * norm + 1;
    last = x;
    return [x, sum / norm];
  });
}

// A number in four digits: with an exponent where it would be a long row of zeros.
function short(value) {
  const size = Math.abs(value), rounded = Number(value.toPrecision(4));
  return size > 0 && (1e-4 > size || size >= 1e7) ? rounded.toExponential() : String(rounded);
}

// Where a step is, or would be, in points sorted by step: the number of points before it.
function position(points, step) {
  let low = 0, high = points.length;
  while (high > low) {
    const middle = (low + high) >> 1;
    if (step > points[middle][0]) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(points, step) {
  const after = Math.min(points.length - 1, position(points, step)), before = Math.max(0, after - 1);
  return step - points[before][0] <= points[after][0] - step ? points[before] : points[after];
}

// The points from low to high, with one more at each side so that lines go on to the edge.
function inSight(points, low, high) {
  const begin = position(points, low);
  let end = begin;
  while (points.length > end && high >= points[end][0]) end++;
  return points.slice(Math.max(0, begin - 1), end + 1);
}

// About `limit` of the points: the lowest and the highest of each window, so that no spike is lost, and the last one.
function thinned(points, limit) {
  if (points.length <= limit) return points;
  const width = Math.ceil(points.length / (limit / 2)), kept = [];
  for (let start = 0; start < points.length; start += width) {
    let low = start, high = start;
    for (let k = start; k < Math.min(points.length, start + width); k++) {
      if (points[k][1] < points[low][1]) low = k;
      if (points[k][1] > points[high][1]) high = k;
    }
    kept.push(points[Math.min(low, high)]);
    if (low !== high) kept.push(points[Math.max(low, high)]);
  }
  const last = points[points.length - 1];
  return kept[kept.length - 1] === last ? kept : [...kept, last];
}

// The range to draw: that of the values, widened where they are all the same. A logarithmic scale has only those above zero.
function bounds(values, isLog) {
  const shown = isLog ? values.filter((value) => value > 0) : values;
  const low = shown.reduce((a, b) => Math.min(a, b), Infinity), high = shown.reduce((a, b) => Math.max(a, b), -Infinity);
  if (high === -Infinity) return null;
  if (high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low, high];
  if (isLog) return [low / 2, high * 2];
  const pad = Math.abs(low) * 0.1 || 1;
  return [low - pad, high + pad];
}

// About `count` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high].
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = ([1, 2, 5].find((m) => m * power >= raw * (1 - 1e-9)) || 10) * power;
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, k) => (first + k) * step);
}

// Powers of ten inside [low, high], some of them where they are many; 1, 2 and 5 times those where they are few.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / 5), factors = last - first > 2 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.ceil(first / every) * every; last >= power; power += every) {
    for (const factor of factors) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low * (1 - 1e-9) && high * (1 + 1e-9) >= value);
  return inside.length > 1 ? inside : ticks(low, high, 4);
}

// The part of 0 to 1 at which a value stands in a range.
function part(value, [low, high], isLog) {
  return isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}
