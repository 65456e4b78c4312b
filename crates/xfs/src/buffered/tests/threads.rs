//! Readers, writers and write-back at the same time.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use offshoot_testkit::random::{Random, seed_of_run};

use super::{BufferModel, BufferedEngine, BufferedModelFile, BufferedVolume, WIDE};
use crate::buffered::BufferLimits;

/// A model of one file.
fn single(file: BufferedModelFile, seed: u64) -> BufferModel {
    BufferModel { files: vec![file], random: Random::new(seed), most_blocks: 600 }
}

/// Each file is changed and read under a lock, as the lock of its inode. Write-back has none of
/// them. A reader sees the bytes of the model at any moment.
fn together(options: &str, limits: BufferLimits) {
    let Some(volume) = BufferedVolume::make(1 << 10, options) else { return };
    let engine = BufferedEngine::new(&volume.disk, limits);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    let mut seeds = Vec::new();
    seeds.resize_with(FILES_CHANGED + 4, || model.random.number());
    let locked: Vec<_> = (model.files.drain(..).zip(&seeds))
        .map(|(file, seed)| RwLock::new(single(file, *seed)))
        .collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..FILES_CHANGED)
            .map(|number| {
                let locked = &locked;
                scope.spawn(move || {
                    for _ in 0..250 {
                        let mut file = locked[number].write().unwrap();
                        // No clones: they need two of the locks.
                        let choice = file.random.below(34);
                        file.change(data, if (22..26).contains(&choice) { 0 } else { choice });
                    }
                })
            })
            .collect();
        for seed in seeds.iter().skip(FILES_CHANGED).take(2) {
            let (locked, is_over) = (&locked, &is_over);
            scope.spawn(move || {
                let mut random = Random::new(*seed);
                while !is_over.load(Ordering::Relaxed) {
                    let number = usize::try_from(random.below(FILES_CHANGED as u64)).unwrap();
                    let file = locked[number].read().unwrap();
                    let file = &file.files[0];
                    let mut found = vec![0; file.bytes.len()];
                    assert_eq!(data.read(&file.buffer, 0, &mut found).unwrap(), found.len());
                    super::assert_same(file, &found);
                }
            });
        }
        scope.spawn(move || data.run_background(|| Some(())));
        let is_over = &is_over;
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                data.write_back_all().unwrap();
            }
        });
        let outcomes: Vec<_> = writers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::Relaxed);
        data.end_background();
        for outcome in outcomes {
            outcome.unwrap();
        }
    });
    let files = locked.into_iter().flat_map(|locked| locked.into_inner().unwrap().files);
    model.files = files.collect();
    volume.assert_cut_recovers(&engine, &model);
    volume.assert_unmounts(engine, &model);
}

const FILES_CHANGED: usize = 3;

#[test]
fn readers_find_the_model_while_others_write_and_write_back() {
    together("-b size=1024", WIDE);
}

#[test]
fn readers_find_the_model_where_little_memory_is_allowed() {
    together("", BufferLimits { bytes: 256 << 10, ..WIDE });
}
