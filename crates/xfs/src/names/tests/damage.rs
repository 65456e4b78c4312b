//! Parent pointers on a damaged volume.

use offshoot_xfs_format::identity::XfsIdentity;

use super::*;

/// The blocks with the attributes of a volume without others: those of files with many names.
fn attribute_blocks(device: &dyn BlockDevice, block_size: usize) -> Vec<u64> {
    let mut bytes = vec![0; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(0, &mut bytes).unwrap();
    let is_leaf = |block: &&[u8]| block.get(8..10) == Some(&[0x3b, 0xee]);
    let blocks = bytes.chunks(block_size).enumerate();
    blocks.filter(|(_, block)| is_leaf(block)).map(|(at, _)| (at * block_size) as u64).collect()
}

/// Each change of a name works, or fails and changes nothing; and the volume is written on. The
/// damage is in a leaf of parent pointers, which only the last step of a chain changes.
#[test]
fn a_damaged_parent_pointer_refuses_a_change_and_does_not_end_writing() {
    const NAMES: usize = 120;
    let Some(bench) = NameBench::make(128, "--unsupported -b size=1024 -n parent=1") else {
        return;
    };
    let (root, new) = (bench.root(), new_file(0o600, 1));
    let name = |number: usize| format!("name {number:03}").into_bytes();
    let names = bench.names();
    let ino = {
        let place = NamePlace { dir: root, name: &name(0) };
        names.create(place, XfsNewKind::Regular, &new).unwrap()
    };
    for number in 1..NAMES {
        names.link(ino, NamePlace { dir: root, name: &name(number) }, at(1)).unwrap();
    }
    let NameBench { disk, engine, .. } = bench;
    let block_size = engine.geometry().block_size();
    engine.unmount().unwrap();
    let device = disk.writable_device();
    let leaves = attribute_blocks(&*device, block_size);
    assert!(leaves.len() > 3, "{} leaves", leaves.len());
    let mut block = vec![0; block_size];
    device.read_at(leaves[1], &mut block).unwrap();
    // Two hashes change places, and the checksum is right.
    let (first, second) = (block[80..84].to_vec(), block[88..92].to_vec());
    block[80..84].copy_from_slice(&second);
    block[88..92].copy_from_slice(&first);
    let identity = XfsIdentity::NODE;
    let lsn = identity.lsn_of(&block).unwrap();
    identity.seal(&mut block, lsn);
    device.write_at(leaves[1], &block).unwrap();
    drop(device);

    let bench = NameBench::on(disk, "");
    let names = bench.names();
    let (mut done, mut refused) = (0, 0);
    for number in 0..NAMES - 1 {
        let (old, other) = (name(number), format!("other {number}").into_bytes());
        let [old, other] = [&old, &other].map(|name| NamePlace { dir: root, name });
        let outcome = match number % 3 {
            0 => names.unlink(old, at(2)).map(drop),
            1 => names.rename(old, other, Rename::Replace, at(2)).map(drop),
            _ => names.link(ino, other, at(2)),
        };
        let is_there = |place| names.look_up(place).unwrap().is_some();
        match outcome {
            Ok(()) => done += 1,
            Err(error) => {
                refused += 1;
                assert!(matches!(error, Error::Corrupt(_)), "{error}");
                assert!(is_there(old) && !is_there(other));
            }
        }
        let place = format!("new {number}").into_bytes();
        names.create(NamePlace { dir: root, name: &place }, XfsNewKind::Regular, &new).unwrap();
    }
    assert!(done > 10 && refused > 5, "{done} done, {refused} refused");
    bench.engine.unmount().unwrap();
}
