//! Compares the states of the crash device with a slow definition of what a power cut may leave.
//!
//! The definition below shares only the log with the code under test. On a device of a few sectors
//! it tries every cut, every subset of the pending writes, and every order of each subset. With
//! torn writes the sectors are independent of each other, so it then asks for each sector alone
//! whether some order of some of the pending writes gives it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashEntry, CrashLog, CrashPlan, CrashState, MemoryDevice,
    SECTOR_BYTES,
};
use offshoot_testkit::random::Random;

const SECTORS: u64 = 6;
const DEVICE_BYTES: u64 = SECTORS * SECTOR_BYTES;
const LOGS: u64 = 300;

type DeviceBytes = Vec<u8>;

fn image(device: &dyn BlockDevice) -> DeviceBytes {
    let mut bytes = vec![0; usize::try_from(device.size_bytes()).expect("a small device")];
    device.read_at(0, &mut bytes).expect("memory is read");
    bytes
}

fn states(log: &CrashLog, plan: &CrashPlan) -> Vec<CrashState> {
    log.states(plan).collect::<Result<_, _>>().expect("memory is read")
}

/// The bytes of all devices, one device behind the other.
fn images(devices: &[MemoryDevice]) -> DeviceBytes {
    devices.iter().map(|device| image(device)).collect::<Vec<_>>().concat()
}

/// A log of a few writes and discards with barriers and marks between them, over bases that are not
/// empty. Some writes overlap, and some are not aligned.
fn random_log(random: &mut Random, count: usize) -> CrashLog {
    let base = random.bytes(usize_of(DEVICE_BYTES) * count);
    let bases = base.chunks(usize_of(DEVICE_BYTES));
    let bases = bases.map(|base| Arc::new(MemoryDevice::new(base.to_vec())) as Arc<_>).collect();
    let set = CrashDevice::set(bases);
    let mut pending = vec![0; count];
    for step in 0..3 + random.below(9) {
        // With one device the choice draws no random number.
        let number = if count == 1 { 0 } else { usize_of(random.below(count as u64)) };
        let device = &set[number];
        match random.below(10) {
            0..=5 if pending.iter().sum::<usize>() < 4 => {
                let grain = if random.below(3) == 0 { 200 } else { SECTOR_BYTES };
                let at = random.below(DEVICE_BYTES / grain) * grain;
                let len = ((1 + random.below(3)) * grain).min(DEVICE_BYTES - at);
                if random.below(6) == 0 {
                    device.discard(at, len).expect("a discard");
                } else {
                    let byte = u8::try_from(step + 1).expect("few steps");
                    let data = vec![byte; usize::try_from(len).expect("small")];
                    device.write_at(at, &data).expect("a write");
                }
                pending[number] += 1;
            }
            0..=7 => {
                device.flush().expect("a flush");
                pending[number] = 0;
            }
            _ => device.mark(&format!("step {step}")),
        }
    }
    set[0].log()
}

/// One way to cut a log: the durable bytes, the pending entries, and how many marks came before.
struct LogCut<'a> {
    durable: DeviceBytes,
    pending: Vec<&'a CrashEntry>,
    marks: usize,
}

fn cuts<'a>(base: &DeviceBytes, log: &'a CrashLog) -> Vec<LogCut<'a>> {
    (0..=log.entries().len())
        .map(|at| {
            let before = &log.entries()[..at];
            let is_mark = |entry: &&CrashEntry| matches!(entry, CrashEntry::Mark(_));
            let is_durable = |at: usize, of: usize| {
                let is_barrier =
                    |e: &CrashEntry| matches!(e, CrashEntry::Barrier { device } if *device == of);
                before[at..].iter().any(is_barrier)
            };
            let (mut durable, mut pending) = (base.clone(), Vec::new());
            for (at, entry) in before.iter().enumerate() {
                match entry {
                    CrashEntry::Write { device, .. } | CrashEntry::Discard { device, .. } => {
                        if is_durable(at, *device) {
                            apply(&mut durable, entry);
                        } else {
                            pending.push(entry);
                        }
                    }
                    CrashEntry::Barrier { .. } | CrashEntry::Mark(_) => {}
                }
            }
            LogCut { durable, pending, marks: before.iter().filter(is_mark).count() }
        })
        .collect()
}

fn apply(image: &mut DeviceBytes, entry: &CrashEntry) {
    let place = |device: usize, offset: u64| device * usize_of(DEVICE_BYTES) + usize_of(offset);
    match entry {
        CrashEntry::Write { device, offset, data } => {
            image[place(*device, *offset)..][..data.len()].copy_from_slice(data);
        }
        CrashEntry::Discard { device, offset, len } => {
            let undefined = MemoryDevice::sparse(DEVICE_BYTES);
            undefined.spoil(0, DEVICE_BYTES).expect("memory");
            let bytes = &self::image(&undefined)[usize_of(*offset)..][..usize_of(*len)];
            image[place(*device, *offset)..][..bytes.len()].copy_from_slice(bytes);
        }
        CrashEntry::Barrier { .. } | CrashEntry::Mark(_) => {}
    }
}

/// Collects every image that some of `pending` in some order can make of `image`.
fn all_outcomes(
    image: &DeviceBytes,
    pending: &[&CrashEntry],
    outcomes: &mut BTreeSet<DeviceBytes>,
) {
    outcomes.insert(image.clone());
    for (at, entry) in pending.iter().enumerate() {
        let mut next = image.clone();
        apply(&mut next, entry);
        let mut rest = pending.to_vec();
        rest.remove(at);
        all_outcomes(&next, &rest, outcomes);
    }
}

fn sector(image: &DeviceBytes, number: u64) -> &[u8] {
    let len = usize::try_from(SECTOR_BYTES).expect("small");
    &image[usize::try_from(number).expect("small") * len..][..len]
}

/// Compares the states of random logs of `devices` devices with all states that the rules allow.
fn assert_exactly_what_is_allowed(devices: usize) {
    let plan = CrashPlan { exhaustive_limit: 4, tears: false, ..CrashPlan::default() };
    for seed in 0..LOGS {
        let log = random_log(&mut Random::new(seed), devices);
        let mut allowed: BTreeMap<DeviceBytes, BTreeSet<usize>> = BTreeMap::new();
        for cut in cuts(&base_of(seed, devices), &log) {
            let mut outcomes = BTreeSet::new();
            all_outcomes(&cut.durable, &cut.pending, &mut outcomes);
            for outcome in outcomes {
                allowed.entry(outcome).or_default().insert(cut.marks);
            }
        }
        let mut built: BTreeMap<DeviceBytes, BTreeSet<usize>> = BTreeMap::new();
        for state in states(&log, &plan) {
            let marks = state.marks_before_earliest_cut()..=state.marks().len();
            built.entry(images(&state.devices)).or_default().extend(marks);
        }
        assert!(built == allowed, "seed {seed}: the states differ for {:?}", log.entries());
    }
}

#[test]
fn whole_writes_give_exactly_the_states_that_the_rules_allow() {
    assert_exactly_what_is_allowed(1);
}

#[test]
fn the_devices_of_a_set_lose_their_caches_one_by_one() {
    assert_exactly_what_is_allowed(2);
    assert_exactly_what_is_allowed(3);
}

#[test]
fn torn_and_sampled_states_are_ones_that_the_rules_allow() {
    let (mut torn_ones, mut all) = (0, 0);
    for seed in 0..LOGS {
        let mut random = Random::new(seed);
        let log = random_log(&mut random, 1);
        let cuts = cuts(&base_of(seed, 1), &log);
        // The contents that each cut allows for every sector, and for the whole device if nothing
        // tears.
        let sectors: Vec<Vec<BTreeSet<Vec<u8>>>> = cuts.iter().map(sector_outcomes).collect();
        let mut whole = BTreeSet::new();
        for cut in &cuts {
            all_outcomes(&cut.durable, &cut.pending, &mut whole);
        }

        for exhaustive_limit in [0, 4] {
            let plan = CrashPlan { exhaustive_limit, samples_per_epoch: 30, seed, tears: true };
            for state in states(&log, &plan) {
                let image = image(&state.devices[0]);
                for marks in state.marks_before_earliest_cut()..=state.marks().len() {
                    let is_allowed = cuts.iter().zip(&sectors).any(|(cut, sectors)| {
                        let fits = |at| sectors[usize_of(at)].contains(sector(&image, at));
                        cut.marks == marks && (0..SECTORS).all(fits)
                    });
                    let what = &state.description;
                    assert!(is_allowed, "seed {seed}: {what}, after {marks} marks");
                }
                torn_ones += usize::from(!whole.contains(&image));
                all += 1;
            }
        }
    }
    assert!(torn_ones * 20 > all, "only {torn_ones} of {all} states show a torn write");
}

/// All contents that each sector may have after a cut.
fn sector_outcomes(cut: &LogCut<'_>) -> Vec<BTreeSet<Vec<u8>>> {
    (0..SECTORS)
        .map(|number| {
            let place = number * SECTOR_BYTES..(number + 1) * SECTOR_BYTES;
            let touches = |entry: &&&CrashEntry| {
                let (offset, len) = match entry {
                    CrashEntry::Write { offset, data, .. } => (*offset, data.len() as u64),
                    CrashEntry::Discard { offset, len, .. } => (*offset, *len),
                    CrashEntry::Barrier { .. } | CrashEntry::Mark(_) => return false,
                };
                offset < place.end && place.start < offset + len
            };
            let pending: Vec<&CrashEntry> = cut.pending.iter().filter(touches).copied().collect();
            let mut outcomes = BTreeSet::new();
            all_outcomes(&cut.durable, &pending, &mut outcomes);
            outcomes.iter().map(|image| sector(image, number).to_vec()).collect()
        })
        .collect()
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

/// The base of `random_log`, which takes it from the seed before anything else.
fn base_of(seed: u64, devices: usize) -> DeviceBytes {
    Random::new(seed).bytes(usize_of(DEVICE_BYTES) * devices)
}

#[test]
fn what_a_mark_behind_a_flush_acknowledges_is_in_every_state_that_has_the_mark() {
    let device = CrashDevice::new(Arc::new(MemoryDevice::sparse(1 << 20)));
    device.write_at(0, &[1; 4096]).expect("a write");
    device.flush().expect("a flush");
    device.mark("the first one is durable");
    device.write_at(8192, &[2; 4096]).expect("a write");
    device.write_at(0, &[3; 512]).expect("a write");

    let (mut without, mut lost_cache) = (0, 0);
    for state in states(&device.log(), &CrashPlan::default()) {
        let image = image(&state.devices[0]);
        if state.marks().is_empty() {
            without += 1;
            assert!(image[8192..12288].iter().all(|&byte| byte == 0), "{}", state.description);
        } else {
            assert_eq!(*state.marks()[0], *"the first one is durable");
            let first = &image[..4096];
            assert!(first[512..].iter().all(|&byte| byte == 1), "{}", state.description);
            let is_lost = first[0] == 1 && image[8192..12288].iter().all(|&byte| byte == 0);
            lost_cache += usize::from(is_lost);
        }
    }
    assert!(without > 0, "no state from before the flush");
    assert!(lost_cache > 0, "no state that lost everything behind the flush");
}

#[test]
fn log_and_plan_decide_the_states() {
    let log = random_log(&mut Random::new(7), 1);
    let run = |seed| -> Vec<(String, DeviceBytes)> {
        let plan = CrashPlan { exhaustive_limit: 1, seed, ..CrashPlan::default() };
        let states = states(&log, &plan).into_iter();
        states.map(|state| (state.description.clone(), image(&state.devices[0]))).collect()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn reads_see_every_write_and_the_base_stays() {
    let base = Arc::new(MemoryDevice::new(vec![9; 4096]));
    let device = CrashDevice::new(base.clone());
    device.write_at(100, &[1; 50]).expect("a write");
    device.discard(0, 10).expect("a discard");
    assert!(device.write_at(4090, &[1; 50]).is_err(), "a write past the end");
    assert!(device.discard(4090, 50).is_err(), "a discard past the end");
    assert_eq!(device.log().entries().len(), 2);
    let now = image(&device);
    assert_eq!((now[10], now[99], now[100], now[150]), (9, 9, 1, 9));
    assert!(now[..10].iter().any(|&byte| byte != 9 && byte != 0), "{:?}", &now[..10]);
    assert_eq!(image(&*base), [9; 4096]);
}

/// An epoch has thousands of writes over a large image, and the test builds all its prefixes. That
/// is possible because a state costs only as much as its own writes.
#[test]
fn a_large_epoch_over_a_large_image_is_cheap() {
    const WRITES: usize = 2000;
    let device = CrashDevice::new(Arc::new(MemoryDevice::sparse(10 << 30)));
    for number in 0..WRITES as u64 {
        let block = [u8::try_from(number % 251).expect("a byte") + 1; 16 << 10];
        device.write_at(number * (4 << 20), &block).expect("a write");
    }
    device.flush().expect("a flush");
    device.mark("all of it");
    let plan = CrashPlan { samples_per_epoch: 10, ..CrashPlan::default() };
    let mut prefixes = 0;
    for state in device.log().states(&plan) {
        let state = state.expect("memory is read");
        let mut byte = [0];
        state.devices[0]
            .read_at((WRITES as u64 - 1) * (4 << 20), &mut byte)
            .expect("memory is read");
        if !state.marks().is_empty() {
            assert_ne!(byte, [0], "{}: durable and lost", state.description);
        }
        prefixes += usize::from(!state.description.contains("torn"));
    }
    assert!(prefixes > WRITES, "only {prefixes} states without torn writes");
}

/// Random states are worth their cost only if they differ in every respect: size, writes and order.
#[test]
fn samples_of_a_large_epoch_are_diverse() {
    const WRITES: u64 = 40;
    let device = CrashDevice::new(Arc::new(MemoryDevice::sparse(1 << 20)));
    for number in 0..WRITES {
        // The last byte of a write is the first of the next one.
        let block = [u8::try_from(number + 1).expect("a byte"); 1025];
        device.write_at(number * 1024, &block).expect("a write");
    }
    let plan = CrashPlan { samples_per_epoch: 300, tears: false, ..CrashPlan::default() };
    let prefixes = usize_of(WRITES) + 1;
    let (mut present, mut alone_of_two, mut swapped) = ([0; 40], [0; 40], [0; 40]);
    let mut sizes = BTreeSet::new();
    let samples = states(&device.log(), &plan).split_off(prefixes);
    for state in &samples {
        let image = image(&state.devices[0]);
        let is_there = |number: usize| image[number * 1024 + 1] != 0;
        sizes.insert((0..40).filter(|&number| is_there(number)).count());
        for number in 0..40 {
            present[number] += usize::from(is_there(number));
            if number > 0 && is_there(number) {
                alone_of_two[number] += usize::from(!is_there(number - 1));
                // Both writes have this byte; it shows the number of the earlier one.
                let shared = usize::from(image[number * 1024]);
                swapped[number] += usize::from(shared == number && is_there(number - 1));
            }
        }
    }
    assert_eq!(samples.len(), 300);
    assert!(present.iter().all(|&times| (30..270).contains(&times)), "{present:?}");
    assert!(alone_of_two[1..].iter().all(|&times| times > 3), "{alone_of_two:?}");
    assert!(swapped[1..].iter().all(|&times| times > 3), "{swapped:?}");
    assert!(sizes.contains(&39) && sizes.len() > 20, "{sizes:?}");
}
