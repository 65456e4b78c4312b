//! Names with one hash: what a search among them costs, in counts that are the same on every
//! machine.

use offshoot_xfs_format::hash::name_hash;

use super::*;

const NAMES: usize = 1600;

/// A name of 60 bytes that has the same hash for each number below 2 to the 45th. In a word of four
/// bytes, the lowest bit of one and the highest bit of the next change the same bit of the hash.
fn name_of_one_hash(number: usize) -> Vec<u8> {
    let mut name = [b'@'; 60];
    for (index, word) in name.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        for place in 0..3 {
            if number >> (index * 3 + place) & 1 != 0 {
                word[place] ^= 1;
                word[place + 1] ^= 0x80;
            }
        }
    }
    name.to_vec()
}

/// A search among names of one hash comes to each of them. It compares a data block or an extent
/// with a bounded number of known ones, so its cost grows as the names do, and not as the names and
/// the blocks together.
#[test]
fn a_search_among_names_of_one_hash_grows_as_the_names_do() {
    let Some(volume) = NamedVolume::make(1 << 10, "-b size=1024", 1, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let dir = volume.directories[0].ino;
    let target = (volume.files[3].ino, volume.files[3].file_type);
    let missing = name_of_one_hash(NAMES);
    assert_eq!(name_hash(&missing), name_hash(&name_of_one_hash(0)));
    let mut costs = Vec::new();
    for number in 0..NAMES {
        let mut t = NamedVolume::begin(&engine, XfsNameChange::Add(3)).unwrap();
        let work = add_name(&mut t, dir, &name_of_one_hash(number), target).unwrap();
        let mut chain = DeferredChain::new(&volume.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[]).unwrap();
        if [NAMES / 2, NAMES].contains(&(number + 1)) {
            let before = engine.block_work().compared;
            let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
            assert_eq!(find_name(&mut t, dir, &missing).unwrap(), None);
            drop(t);
            costs.push((number + 1, engine.block_work().compared - before));
        }
    }
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirNode));
    assert_eq!(costs.len(), 2);
    assert!(costs.iter().all(|&(names, cost)| (1..=names as u64).contains(&cost)), "{costs:?}");
    engine.unmount().unwrap();
}
