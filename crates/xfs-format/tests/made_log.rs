//! Logs that are made here: every kind of item, hostile bytes, and records that reach around the
//! end of the ring.

mod bodies;

use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::log::ends;
use offshoot_xfs_format::log::items::{
    XfsAttributeIntent, XfsAttributeOp, XfsBufferFlags, XfsBufferType, XfsCountExtent,
    XfsEfiExtent, XfsEfiExtents, XfsExchangeFlags, XfsExchangeIntent, XfsFreeIntent,
    XfsIcreateItem, XfsInodeFields, XfsInodeItem, XfsIntent, XfsItemType, XfsMapExtent,
    XfsReplayTurn, buffer_size, core_for_log, encode_buffer,
};
use offshoot_xfs_format::log::op::{self, XfsLogOp, XfsOpFlags, XfsOpWriter, XfsTransactionHeader};
use offshoot_xfs_format::log::record::{self, XfsLogChecksum, header_count, padded_len};
use offshoot_xfs_format::log::{
    XfsCheckpoint, XfsCheckpoints, XfsLogItem, XfsLogRecord, XfsLogRing, XfsLogVector,
};
use offshoot_xfs_format::{
    AgBlock, AgIno, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Lsn, Malformed, XfsGeometry,
};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};

const ID: Uuid = Uuid::from_bytes([7; 16]);

fn geometry() -> XfsGeometry {
    XfsGeometry {
        layout: XfsLayout::CHECKSUMS,
        block_log: 12,
        sector_log: 9,
        inode_log: 9,
        cluster_blocks: 4,
        dir_block_log: 0,
        ag_block_log: 16,
        ag_blocks: 65_536,
        ag_count: 4,
        blocks: 262_144,
        log_start: FsBlock(131_079),
        log_blocks: 256,
        uuid: ID,
    }
}

fn map_extent(flags: u32) -> XfsMapExtent {
    XfsMapExtent {
        owner: U64::new(131),
        start: U64::new(70_000),
        offset: U64::new(5),
        count: U32::new(9),
        flags: U32::new(flags),
    }
}

/// One item of every kind, and what they borrow.
fn each_item(see: &mut dyn FnMut(&XfsLogItem<'_>)) {
    let mut disk = [0; 176];
    disk[..6].copy_from_slice(&[0x49, 0x4e, 0x81, 0xa4, 3, 2]);
    let core = core_for_log(&disk);
    let inode = XfsInodeItem {
        fields: XfsInodeFields::CORE
            | XfsInodeFields::DATA_LOCAL
            | XfsInodeFields::ATTRIBUTES_EXTENTS,
        ino: Ino(133),
        device: 0,
        place: BasicBlock(128),
        blocks: 32,
        offset: 5 * 512,
        core: &core,
        data: Some(b"fifteen bytes ."),
        attributes: Some(&[3; 16]),
    };
    see(&XfsLogItem::Inode(inode));
    let device = XfsInodeFields::CORE | XfsInodeFields::DEVICE;
    see(&XfsLogItem::Inode(XfsInodeItem {
        fields: device,
        device: 0x801,
        data: None,
        attributes: None,
        ..inode
    }));
    let (ag, block) = (AgNumber(1), AgBlock(24));
    let create = XfsIcreateItem { ag, block, count: 64, inode_size: 512, blocks: 8, generation: 9 };
    see(&XfsLogItem::Icreate(create));
    let extents = [1, 2].map(|count| XfsEfiExtent {
        start: U64::new(70_000),
        count: U32::new(count),
        pad: U32::ZERO,
    });
    let free = XfsFreeIntent { id: 5, extents: XfsEfiExtents::Wide(&extents) };
    see(&XfsLogItem::Efi(free));
    see(&XfsLogItem::Efd(free));
    let records = [map_extent(2), map_extent(0x2000_0003)];
    see(&XfsLogItem::Rui(XfsIntent { id: 6, records: &records }));
    let records = [map_extent(0x4000_0001)];
    see(&XfsLogItem::Bui(XfsIntent { id: 7, records: &records }));
    let (start, count) = (U64::new(70_000), U32::new(3));
    let records = [XfsCountExtent { start, count, flags: U32::new(1) }];
    see(&XfsLogItem::Cui(XfsIntent { id: 8, records: &records }));
    for (op, value) in [
        (XfsAttributeOp::Set, Some(&[1; 70][..])),
        (XfsAttributeOp::Replace, None),
        (XfsAttributeOp::Remove, None),
    ] {
        see(&XfsLogItem::Attri(XfsAttributeIntent {
            id: 9,
            ino: Ino(131),
            generation: 0,
            op,
            filter: 2,
            name: b"name of an attribute",
            new_name: None,
            value,
            new_value: None,
        }));
    }
    for op in
        [XfsAttributeOp::SetParent, XfsAttributeOp::RemoveParent, XfsAttributeOp::ReplaceParent]
    {
        let has_two = op == XfsAttributeOp::ReplaceParent;
        see(&XfsLogItem::Attri(XfsAttributeIntent {
            id: 10,
            ino: Ino(131),
            generation: 77,
            op,
            filter: 8,
            name: b"old",
            new_name: has_two.then_some(b"newer"),
            value: Some(&[1; 12]),
            new_value: has_two.then_some(&[2; 12]),
        }));
    }
    see(&XfsLogItem::Xmi(XfsExchangeIntent {
        id: 11,
        inodes: [Ino(131), Ino(132)],
        generations: [1, 2],
        offsets: [FileBlock(0), FileBlock(9)],
        blocks: 16,
        flags: XfsExchangeFlags::SIZES,
        sizes: [100, 200],
    }));
    for item in
        [XfsItemType::Rud, XfsItemType::Cud, XfsItemType::Bud, XfsItemType::Attrd, XfsItemType::Xmd]
    {
        see(&XfsLogItem::Done { item, id: 12 });
    }
}

/// All of them, and buffers.
fn all_items() -> XfsLogVector {
    let mut all = XfsLogVector::default();
    each_item(&mut |item| assert!(item.encode(&mut all)));
    let block: Vec<_> = (0..32).flat_map(|chunk: u8| [chunk; 128]).collect();
    let flags = XfsBufferFlags::of(XfsBufferType::DirectoryBlock);
    encode_buffer(flags, BasicBlock(640), &block, &[U32::new(0xf800_0301)], &mut all);
    let flags = XfsBufferFlags::of(XfsBufferType::Inodes) | XfsBufferFlags::INODES;
    let cluster = [[0xee; 96].as_slice(), &[0, 0, 0, 9], &[0xee; 412]].concat().repeat(32);
    encode_buffer(flags, BasicBlock(128), &cluster, &[0x11, 0, 0, 0x1000].map(U32::new), &mut all);
    encode_buffer(XfsBufferFlags::CANCEL, BasicBlock(648), &block, &[U32::ZERO], &mut all);
    all
}

/// Parses the items of `vector`, and gives each to `see`.
fn parse_all(vector: &XfsLogVector, mut see: impl FnMut(Result<XfsLogItem<'_>, Malformed>)) {
    let mut rest = vector.regions();
    while let Some(first) = rest.get(0) {
        let count = u16::from_le_bytes([first[2], first[3]]).into();
        let (item, others) = rest.split_at(count).expect("all regions");
        see(XfsLogItem::parse(item));
        rest = others;
    }
}

#[test]
fn every_item_is_what_it_was_before_it_was_encoded() {
    let (all, mut again) = (all_items(), XfsLogVector::default());
    let mut kinds = 0;
    parse_all(&all, |item| {
        let item = item.expect("an item");
        item.check(&geometry()).expect("it leads to where it may");
        assert!(item.encode(&mut again));
        kinds += 1;
    });
    assert_eq!((all.regions(), kinds), (again.regions(), 23));
    each_item(&mut |item| {
        let mut alone = XfsLogVector::default();
        assert!(item.encode(&mut alone));
        assert_eq!(XfsLogItem::parse(alone.regions()).as_ref(), Ok(item));
    });
}

#[test]
fn runs_turns_and_unlinked_inodes_of_buffers() {
    let mut turns = Vec::new();
    parse_all(&all_items(), |item| {
        let XfsLogItem::Buffer(buffer) = item.expect("an item") else { return };
        turns.push(XfsLogItem::Buffer(buffer).turn());
        let runs: Vec<_> = buffer.runs().map(|run| (run.offset, run.data.len())).collect();
        match buffer.flags.block_type() {
            Some(XfsBufferType::DirectoryBlock) => {
                assert_eq!(runs, [(0, 128), (1024, 256), (3456, 640)]);
            }
            Some(_) => {
                let unlinked: Vec<_> = buffer.unlinked(512).collect();
                let next = AgIno(9);
                assert_eq!(unlinked, [(0, next), (1, next), (27, next)]);
            }
            None => assert!(runs.is_empty()),
        }
    });
    let expected = [XfsReplayTurn::Buffers, XfsReplayTurn::InodeBuffers, XfsReplayTurn::Cancels];
    assert_eq!(turns, expected);
    assert_eq!(buffer_size(&[0; 4096], &[U32::new(0xf800_0301)]), (24 + 1024, 4));
}

/// The problem of the item with these regions, found by parsing or by the check.
fn problem(regions: &[&[u8]]) -> String {
    let mut vector = XfsLogVector::default();
    for region in regions {
        vector.push(&[region]);
    }
    let item = XfsLogItem::parse(vector.regions());
    match item.and_then(|item| item.check(&geometry())) {
        Ok(()) => "none".to_owned(),
        Err(problem) => problem.to_string(),
    }
}

/// The regions of an item, as a vector of their own.
fn regions_of(item: &XfsLogItem<'_>) -> Vec<Vec<u8>> {
    let mut vector = XfsLogVector::default();
    assert!(item.encode(&mut vector));
    vector.regions().iter().map(<[u8]>::to_vec).collect()
}

#[test]
fn hostile_items_are_refused_and_32_bit_ones_are_read() {
    let buffer = |blocks: u8, words: u8, map: u32| {
        let head = [0x3c, 0x12, 2, 0, 0, 0x20, blocks, 0, 8, 0, 0, 0, 0, 0, 0, 0, words, 0, 0, 0];
        [head.as_slice(), &map.to_le_bytes()].concat()
    };
    let data = [0; 256];
    assert_eq!(problem(&[&buffer(1, 1, 3), &data]), "none");
    assert!(problem(&[&buffer(1, 1, 0x30), &data]).contains("256 bytes of data at 512 of 512"));
    assert!(problem(&[&buffer(1, 1, 1), &data]).contains("256 bytes of data at 0"));
    assert!(problem(&[&buffer(1, 1, 7), &data]).contains("no data for its byte 256"));
    assert!(problem(&[&buffer(1, 1, 0), &data]).contains("behind its map"));
    assert!(problem(&[&buffer(1, 2, 3), &data]).contains("a map of 2 words in 4 bytes"));
    assert!(problem(&[&buffer(1, 1, 3), &data, &data]).contains("2 regions expected, 3 found"));
    assert_eq!(problem(&[&buffer(128, 1, 3), &data]), "none");
    assert!(problem(&[&buffer(129, 1, 3), &data]).contains("a buffer of 129 blocks at 8"));
    let mut far = buffer(1, 1, 3);
    far[15] = 0x80;
    assert!(problem(&[&far, &data]).contains("a buffer of 1 blocks at"));
    let log = geometry().place_of(geometry().log_start).expect("a place").0;
    far[8..16].copy_from_slice(&log.to_le_bytes());
    assert!(problem(&[&far, &data]).contains("a buffer of 1 blocks at 1048632"));

    // The extents of 32-bit machines have 12 bytes, and their inodes 52.
    let packed = [&[0x36, 0x12, 1, 0, 2, 0, 0, 0], [5; 8].as_slice(), &[0, 0x40, 0, 0], &[0; 4]];
    let packed = [packed.concat(), vec![1, 0, 0, 0], vec![0, 0x41, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]];
    let packed = packed.concat();
    assert_eq!(problem(&[&packed]), "none");
    assert!(problem(&[&packed[..36]]).contains("2 records in 20 bytes"));
    let mut count = packed.clone();
    count[4..8].fill(0xff);
    assert!(problem(&[&count]).contains("4294967295 records in 24 bytes"));
    let mut first = true;
    each_item(&mut |item| {
        if let (XfsLogItem::Inode(inode), true) = (item, std::mem::take(&mut first)) {
            // The first inode of the log's first block.
            let ino = Ino(geometry().log_start.0 << 3);
            let place = BasicBlock(log);
            let in_log = XfsInodeItem { ino, place, offset: 0, ..*inode };
            let problem_in_log = XfsLogItem::Inode(in_log).check(&geometry()).expect_err("in it");
            assert!(problem_in_log.problem.contains("1 blocks from 7 of group 2"));
            let regions = regions_of(item);
            let short = [&regions[0][..12], &regions[0][16..]].concat();
            let mut regions: Vec<_> = regions.iter().map(Vec::as_slice).collect();
            regions[0] = &short;
            assert_eq!(problem(&regions), "none");
            regions[2] = &regions[2][..12];
            assert!(problem(&regions).contains("a fork of 15 bytes in 12"));
        }
    });
    let geometry = geometry();
    for start in [geometry.log_start.0 + 9, 0, 65_535, 1 << 60] {
        let extents = [XfsEfiExtent { start: U64::new(start), count: U32::new(2), pad: U32::ZERO }];
        let free = XfsFreeIntent { id: 1, extents: XfsEfiExtents::Wide(&extents) };
        assert!(XfsLogItem::Efi(free).check(&geometry).is_err(), "{start}");
    }
    assert!(problem(&[&[0x99, 0x12, 1, 0]]).contains("type 0x1299 is unknown"));
    let unsupported = |first: &[u8]| {
        let mut vector = XfsLogVector::default();
        vector.push(&[first]);
        matches!(XfsLogItem::parse(vector.regions()), Ok(XfsLogItem::Unsupported(_)))
    };
    assert!(unsupported(&[0x3d, 0x12, 1, 0]) && unsupported(&[0x4e, 0x12, 1, 0]));
}

fn record(tail: Lsn, lsn: Lsn, len: usize, ops: u32, buffer: u32) -> XfsLogRecord {
    XfsLogRecord {
        lsn,
        tail,
        version: 2,
        len: u32::try_from(len).expect("small"),
        previous: None,
        ops,
        byte_order: 1,
        uuid: ID,
        buffer,
    }
}

/// Writes a transaction with `vector` from `first` on, in records of `body_len` bytes and their
/// headers. Returns the head.
fn write_log(
    log: &mut [u8],
    ring: XfsLogRing,
    first: Lsn,
    buffer: u32,
    body_len: usize,
    vector: &XfsLogVector,
) -> Lsn {
    let headers = header_count(2, buffer);
    let mut body = vec![0; body_len];
    let mut lsn = first;
    let mut flush = |body: &mut Vec<u8>, used: usize, ops: u32| {
        let len = padded_len(used, headers, 512);
        let record = record(first, lsn, len, ops, buffer);
        let mut blocks = vec![0; headers as usize * 512];
        blocks.extend_from_slice(&body[..len]);
        record.seal(ring, &mut blocks).expect("it fits");
        for (block, at) in blocks.chunks(512).zip(0..) {
            let at = ring.advance(lsn, at).block() as usize * 512;
            log[at..at + 512].copy_from_slice(block);
        }
        body.fill(0);
        lsn = ring.advance(lsn, record.block_count());
        lsn
    };
    let header = XfsTransactionHeader { tid: 4, regions: 3 }.encode();
    let mut writer = XfsOpWriter::new(&mut body, 0, 0);
    assert!(writer.start(4));
    let (mut used, mut ops) = (writer.used(), writer.count());
    for region in std::iter::once(&header[..]).chain(vector.regions().iter()) {
        let mut done = 0;
        while done < region.len() {
            let mut writer = XfsOpWriter::new(&mut body, used, ops);
            let now = writer.region(4, region, done);
            (used, ops) = (writer.used(), writer.count());
            if now == done || now < region.len() {
                flush(&mut body, used, ops);
                (used, ops) = (0, 0);
            }
            done = now;
        }
    }
    let mut writer = XfsOpWriter::new(&mut body, used, ops);
    if !writer.commit(4) {
        flush(&mut body, used, ops);
        writer = XfsOpWriter::new(&mut body, 0, 0);
        assert!(writer.commit(4));
    }
    (used, ops) = (writer.used(), writer.count());
    flush(&mut body, used, ops)
}

/// Reads the log as recovery does.
fn read_log(log: &[u8], ring: XfsLogRing) -> Result<Vec<XfsCheckpoint>, Malformed> {
    let mut read = |block: u32, buffer: &mut [u8]| {
        buffer.copy_from_slice(&log[block as usize * 512..][..buffer.len()]);
        Ok(())
    };
    let ends = ends::find::<_>(ring, ID, &mut read)?;
    let (mut at, mut buffer, mut whole) = (ends.tail, Vec::new(), Vec::new());
    let mut open = XfsCheckpoints::new(ring);
    while at != ends.head {
        let (record, checksum) = ends::read_record(ring, at, &mut read, &mut buffer)??;
        assert_eq!(checksum, XfsLogChecksum::Right);
        for op in op::ops(record.unpack(&mut buffer)?, record.ops) {
            whole.extend(open.add(record.lsn, &op?)?);
        }
        at = ring.advance(at, record.block_count());
    }
    assert_eq!(open.open_count(), 0);
    Ok(whole)
}

/// A ring in which every block has the cycle of the round before block `head`.
fn written_ring(ring: XfsLogRing, head: Lsn) -> Vec<u8> {
    let mut log = vec![0; ring.blocks() as usize * 512];
    for (block, at) in log.chunks_mut(512).zip(0..) {
        let cycle = if at < head.block() { head.cycle() } else { head.cycle() - 1 };
        block[..4].copy_from_slice(&cycle.to_be_bytes());
    }
    log
}

#[test]
fn a_log_whose_first_block_alone_is_zero_is_damaged() {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let zeroed = vec![0; ring.blocks() as usize * 512];
    assert_eq!(read_log(&zeroed, ring).expect("it is empty").len(), 0);
    let mut first = written_ring(ring, Lsn::new(3, 100));
    first[..512].fill(0);
    let mut last = zeroed.clone();
    last[1023 * 512 + 3] = 1;
    for (log, block) in [(first, 1), (last, 1023)] {
        let problem = read_log(&log, ring).expect_err("it is damaged").problem;
        assert!(problem.contains(&format!("block {block} is not zero")), "{problem}");
    }
}

#[test]
fn regions_longer_than_records_and_records_over_the_end_of_the_ring_are_read() {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let all = all_items();
    for body_len in [512, 1024, 4096, 7680] {
        for buffer in [32 << 10, 256 << 10, 48 << 10] {
            // Records begin up to 24 blocks before the end, so that headers are cut too.
            for start in [0, 1000, 1012, 1015, 1020, 1023] {
                let first = Lsn::new(2, start);
                let mut log = written_ring(ring, first);
                let head = write_log(&mut log, ring, first, buffer, body_len, &all);
                let whole = read_log(&log, ring).expect("a log");
                assert_eq!(whole.len(), 1);
                assert_eq!((whole[0].lsn, whole[0].tid), (first, 4));
                assert!(ring.distance(whole[0].committed, head) > Some(0));
                assert!(whole[0].regions() == all.regions());
            }
        }
    }
}

#[test]
fn transactions_interleave_and_unfinished_ones_are_passed_over() {
    const START: u8 = 1;
    const COMMIT: u8 = 2;
    const CONTINUES: u8 = 4;
    const LAST_PIECE: u8 = 0x18;
    let header = XfsTransactionHeader { tid: 0, regions: 1 }.encode();
    let item: &[u8] = &[0x3d, 0x12, 1, 0, 1, 2, 3, 4];
    // Feeds ops, each one of a record of its own, and returns the transactions that are whole.
    let feed = |ring: u32, ops: &[(u32, u8, &[u8])]| {
        let mut open = XfsCheckpoints::new(XfsLogRing::new(ring).expect("a ring"));
        let mut whole = Vec::new();
        for (&(tid, flags, data), at) in ops.iter().zip(0..) {
            let flags = XfsOpFlags::from_bits_retain(flags);
            let op = XfsLogOp { tid, client: 0x69, flags, data };
            let done = open.add(Lsn::new(1, at), &op)?;
            whole.extend(done.map(|done| {
                let regions: Vec<_> = done.regions().iter().map(<[u8]>::to_vec).collect();
                (done.tid, done.lsn.block(), done.committed.block(), regions)
            }));
        }
        Ok::<_, Malformed>((whole, open.open_count()))
    };
    let ops: &[(u32, u8, &[u8])] = &[
        (9, 0, item),
        (1, START, &[]),
        (2, START, &[]),
        (2, CONTINUES, &header[..8]),
        (1, 0, &header),
        (2, LAST_PIECE, &header[8..]),
        (1, CONTINUES, &item[..4]),
        (3, START, &[]),
        (2, COMMIT, &[]),
        (9, COMMIT, &[]),
        (1, LAST_PIECE, &item[4..]),
        (1, COMMIT, &[]),
    ];
    let expected = vec![(2, 2, 8, vec![]), (1, 1, 11, vec![item.to_vec()])];
    assert_eq!(feed(8, ops), Ok((expected, 1)));
    // Recovery takes the log itself as a client too, and refuses any other (seen).
    let mut open = XfsCheckpoints::new(XfsLogRing::new(8).expect("a ring"));
    for (client, is_known) in [(0x69, true), (0xaa, true), (0x11, false)] {
        let op = XfsLogOp { tid: 5, client, flags: XfsOpFlags::START, data: &[] };
        let taken = open.add(Lsn::new(1, 0), &XfsLogOp { tid: client.into(), ..op });
        assert_eq!(taken.is_ok(), is_known, "{client:#x}");
    }
    let problem = |ops: &[(u32, u8, &[u8])]| {
        let mut all: Vec<(u32, u8, &[u8])> = vec![(1, START, &[]), (1, 0, &header)];
        all.extend(ops);
        feed(1, &all).expect_err("it is impossible").problem
    };
    assert!(problem(&[(1, START, &[])]).contains("op flags 0x1 in the open transaction 0x1"));
    assert!(problem(&[(1, LAST_PIECE, item)]).contains("a rest without a split region"));
    assert!(problem(&[(1, CONTINUES, item), (1, 0, item)]).contains("a start before the end"));
    assert!(problem(&[(1, CONTINUES, item), (1, COMMIT, &[])]).contains("is cut"));
    let two: &[u8] = &[0x3d, 0x12, 2, 0];
    assert!(problem(&[(1, 0, two), (1, COMMIT, &[])]).contains("an item of 2 regions where 1"));
    assert!(problem(&[(1, 0, &[0; 4]), (1, COMMIT, &[])]).contains("an item of 0 regions"));
    assert!(problem(&[(1, 0, &[0; 500])]).contains("1 open transactions take"));
}

/// A torn write may have destroyed the tail that the last whole record names, but only where it
/// could reach: a little behind the head.
#[test]
fn a_tail_that_a_torn_write_reached_is_passed_over() {
    let (once, mut all) = (all_items(), XfsLogVector::default());
    for region in once.regions().iter().chain(once.regions().iter()).chain(once.regions().iter()) {
        all.push(&[region]);
    }
    for (blocks, is_reached) in [(400, true), (1024, false)] {
        let ring = XfsLogRing::new(blocks).expect("a ring");
        let first = Lsn::new(2, 300);
        let mut log = written_ring(ring, first);
        write_log(&mut log, ring, first, 32 << 10, 512, &all);
        assert_eq!(read_log(&log, ring).map(|whole| whole.len()), Ok(1));
        log[300 * 512 + 700] ^= 1;
        let mut read = |block: u32, buffer: &mut [u8]| {
            buffer.copy_from_slice(&log[block as usize * 512..][..buffer.len()]);
            Ok::<_, Malformed>(())
        };
        let tail = ends::find(ring, ID, &mut read).map(|ends| ends.tail);
        assert_eq!(tail.clone().ok(), is_reached.then_some(Lsn::new(2, 302)), "{tail:?}");
    }
}

#[test]
fn each_flip_in_a_record_is_found_and_i386_wrote_other_checksums() {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let mut blocks = vec![0x5a; 512 * (2 + 66)];
    let sealed = record(Lsn::new(2, 1000), Lsn::new(2, 1000), 66 * 512, 0, 48 << 10);
    sealed.seal(ring, &mut blocks).expect("it fits");
    assert_eq!(XfsLogRecord::parse(&blocks).as_ref(), Ok(&sealed));
    let right = sealed.checksum(&blocks);
    assert_eq!(right, Ok(XfsLogChecksum::Right));
    // Behind 328 and 260 bytes of the headers nothing is covered.
    for at in (0..324).chain(512..512 + 260).chain(1024..blocks.len()) {
        blocks[at] ^= 0x10;
        assert_eq!(sealed.checksum(&blocks), Ok(XfsLogChecksum::Wrong), "byte {at}");
        blocks[at] ^= 0x10;
    }
    let covered = [&blocks[..32], &[0; 4], &blocks[36..324], &blocks[512..772], &blocks[1024..]];
    let crc = crc32c(&covered.concat());
    blocks[32..36].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(sealed.checksum(&blocks), right);
    blocks[32..36].fill(0);
    assert_eq!(sealed.checksum(&blocks), Ok(XfsLogChecksum::Missing));
    assert!(sealed.unpack(&mut blocks).expect("it is whole").iter().all(|&byte| byte == 0x5a));
    assert!(sealed.checksum(&blocks[..1024]).is_err());
    let mut swapped = sealed.clone();
    swapped.byte_order = 2;
    let problem = swapped.check_readable(ID).expect_err("it is big-endian").problem;
    assert!(problem.contains("of a big-endian Linux machine"));
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1)))
    })
}

#[test]
fn stamps_behind_the_head_leave_it_where_it_is() {
    let ring = XfsLogRing::new(8).expect("a ring");
    for (cycle, before) in [(5, 4), (1, 0), (0xfeed_babf, 0xfeed_babd)] {
        let head = Lsn::new(cycle, 6);
        let like = record(Lsn::new(cycle, 3), Lsn::new(cycle, 4), 512, 1, 32 << 10);
        let mut cycles = [cycle; 8];
        let mut blocks = [6, 7, 0].into_iter();
        for stamp in like.stamps(ring, head, 3) {
            let at = blocks.next().expect("a block");
            assert!(record::is_header(&stamp));
            assert_eq!(stamp[16..24], Lsn::new(record::cycle_of(&stamp), at).0.to_be_bytes());
            cycles[at as usize] = record::cycle_of(&stamp);
        }
        // The last stamp is of the next round, and behind the end: its cycle is that of the head.
        assert_eq!(cycles[..], [[cycle; 6].as_slice(), &[before; 2]].concat());
        let found = ring.find_head(|block| Ok::<_, Malformed>(cycles[block as usize]));
        assert_eq!(found, Ok(head));
    }
}

#[test]
fn a_map_of_a_buffer_is_no_larger_than_the_largest_buffer() {
    let regions_with = |words: u32| {
        let mut format = vec![0x3c, 0x12, 1, 0, 0, 0x20, 1, 0, 8, 0, 0, 0, 0, 0, 0, 0];
        format.extend(words.to_le_bytes());
        format.resize(format.len() + 4 * words as usize, 0);
        problem(&[&format])
    };
    assert_eq!(regions_with(8192), "none");
    assert!(regions_with(8193).contains("a map of 8193 words"));
}

/// An inode of this version, with `core` bytes of core in the log and this change to them.
fn inode_problem(
    geometry: &XfsGeometry,
    version: u8,
    core: usize,
    change: impl Fn(&mut [u8]),
) -> String {
    let mut disk = [0; 176];
    disk[..6].copy_from_slice(&[0x49, 0x4e, 0x81, 0xa4, version, 2]);
    change(&mut disk);
    let core_bytes = core_for_log(&disk);
    let item = XfsInodeItem {
        fields: XfsInodeFields::CORE,
        ino: Ino(133),
        device: 0,
        place: BasicBlock(128),
        blocks: 32,
        offset: 5 * 512,
        core: &core_bytes[..core],
        data: None,
        attributes: None,
    };
    let mut vector = XfsLogVector::default();
    assert!(XfsLogItem::Inode(item).encode(&mut vector));
    let parsed = XfsLogItem::parse(vector.regions());
    let verdict = parsed.and_then(|item| item.check(geometry));
    verdict.map_or_else(|problem| problem.problem.into_owned(), |()| "none".to_owned())
}

#[test]
fn a_core_of_the_log_has_the_version_and_the_length_of_its_volume() {
    let v5 = geometry();
    let v4 = XfsGeometry { layout: XfsLayout::empty(), ..geometry() };
    for version in [1, 2] {
        assert_eq!(inode_problem(&v4, version, 96, |_| {}), "none");
        for longer in [100, 176] {
            assert!(inode_problem(&v4, version, longer, |_| {}).contains("a core of"));
        }
        assert!(inode_problem(&v5, version, 96, |_| {}).contains("version"));
    }
    assert_eq!(inode_problem(&v5, 3, 176, |_| {}), "none");
    assert!(inode_problem(&v4, 3, 176, |_| {}).contains("version 3"));
}

#[test]
fn a_core_of_the_log_has_only_flags_of_its_volume() {
    let all = XfsGeometry { layout: XfsLayout::all(), ..geometry() };
    for (flag, mode) in [(2, 0x81), (4, 0x81), (4, 0x41), (8, 0x81), (16, 0x81), (32, 0x81)] {
        let change = |disk: &mut [u8]| (disk[2], disk[127]) = (mode, flag);
        assert!(inode_problem(&geometry(), 3, 176, change).contains("flags"), "{flag}");
        assert_eq!(inode_problem(&all, 3, 176, change), "none", "{flag}");
    }
    let shared_directory = |disk: &mut [u8]| (disk[2], disk[127]) = (0x41, 2);
    assert!(inode_problem(&all, 3, 176, shared_directory).contains("flags 0x2 in mode"));
    let both_counts = |disk: &mut [u8]| (disk[127], disk[81]) = (16, 1);
    assert!(inode_problem(&all, 3, 176, both_counts).contains("count of extents"));
}

#[test]
fn intents_have_owners_and_ranges_that_the_volume_can_have() {
    let geometry = geometry();
    let changed = |owner: i64, offset: u64, flags: u32| XfsMapExtent {
        owner: U64::new(owner.cast_unsigned()),
        offset: U64::new(offset),
        ..map_extent(flags)
    };
    let rui = |record: XfsMapExtent| {
        let records = [map_extent(2), record];
        XfsLogItem::Rui(XfsIntent { id: 6, records: &records }).check(&geometry).is_ok()
    };
    assert!(rui(changed(131, 0, 1)) && rui(changed(-9, 0, 7)));
    assert!(!rui(changed(1 << 40, 0, 1)), "an inode behind the end");
    assert!(!rui(changed(-2, 0, 7)), "an owner without a meaning");
    assert!(!rui(changed(131, (1 << 54) - 8, 1)), "it ends behind the largest file");
    let bui = |records: &[XfsMapExtent]| {
        XfsLogItem::Bui(XfsIntent { id: 7, records }).check(&geometry).is_ok()
    };
    let one = changed(131, 0, 1);
    assert!(bui(&[one]) && !bui(&[]) && !bui(&[one, one]));
    assert!(!bui(&[changed(131, u64::MAX, 1)]));
}

#[test]
fn the_flags_of_a_mapping_say_what_it_is() {
    let of = |flags: u32| {
        let map = map_extent(flags);
        let is = [map.is_attributes(), map.is_tree_block(), map.is_reverse_unwritten()];
        (is, map.reverse_op().is_ok(), map.map_op().is_ok(), map.is_map_unwritten())
    };
    assert_eq!(of(1), ([false; 3], true, true, false));
    assert_eq!(of(1 << 31 | 2), ([true, false, false], true, true, false));
    assert_eq!(of(1 << 30 | 2), ([false, true, false], true, true, true));
    assert_eq!(of(1 << 29 | 2), ([false, false, true], true, false, false), "realtime");
    assert_eq!(of(9), ([false; 3], false, false, false));
    assert_eq!(of(1 << 8 | 1), ([false; 3], false, false, false));
}

#[test]
fn a_cancelled_buffer_carries_no_chunks() {
    let (bytes, dirty) = ([1; 1024], [U32::new(0b11)]);
    for (flags, regions) in [
        (XfsBufferFlags::of(XfsBufferType::Btree), 2),
        (XfsBufferFlags::of(XfsBufferType::Btree) | XfsBufferFlags::CANCEL, 1),
    ] {
        let mut vector = XfsLogVector::default();
        encode_buffer(flags, BasicBlock(128), &bytes, &dirty, &mut vector);
        assert_eq!(vector.regions().len(), regions);
        assert!(XfsLogItem::parse(vector.regions()).is_ok());
    }
}

#[test]
fn a_vector_counts_its_bytes_with_their_padding() {
    let mut vector = XfsLogVector::with_capacity(16, 2);
    vector.push(&[b"five", b"!"]);
    vector.push(&[]);
    assert_eq!((vector.byte_count(), vector.regions().len()), (8, 2));
    assert_eq!(vector.regions().get(0), Some(b"five!\0\0\0".as_slice()));
    vector.clear();
    assert_eq!((vector.byte_count(), vector.regions().len()), (0, 0));
}

#[test]
fn what_mkfs_writes_for_a_large_unit_is_read() {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let like = record(Lsn::new(1, 0), Lsn::new(1, 0), 512, 1, 32 << 10);
    let mut block = like.stamps(ring, Lsn::new(2, 0), 1).next().expect("one");
    assert!(XfsLogRecord::parse(&block).is_err(), "a stamp is no record");
    block[12..16].copy_from_slice(&(261_632_u32).to_be_bytes());
    block[320..324].copy_from_slice(&(32_768_u32).to_be_bytes());
    block[40..44].copy_from_slice(&1_u32.to_be_bytes());
    let record = XfsLogRecord::parse(&block).expect("a record");
    assert_eq!((record.header_blocks(), record.block_count()), (1, 512));
    record.check_place(ring, 0).expect("it is there");
    let mut blocks = vec![1; 512 * 512];
    assert_eq!(record.unpack(&mut blocks).map(<[u8]>::len), Ok(261_632));
    block[43] = 2;
    assert!(XfsLogRecord::parse(&block).is_err(), "with two ops it is hostile");
}

/// Random damage: whatever is read, nothing panics.
#[test]
fn damaged_bodies_do_not_panic() {
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("OFFSHOOT_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 16).expect("64 bits") % below
    };
    let all = all_items();
    let mut body = vec![0; 64 << 10];
    let mut writer = XfsOpWriter::new(&mut body, 0, 0);
    assert!(writer.start(4));
    let header = XfsTransactionHeader { tid: 4, regions: 3 }.encode();
    for region in std::iter::once(&header[..]).chain(all.regions().iter()) {
        assert_eq!(writer.region(4, region, 0), region.len());
    }
    assert!(writer.commit(4));
    let (used, count) = (writer.used(), writer.count());
    let mut parsed = 0;
    for _ in 0..20_000 {
        let mut damaged = body[..used].to_vec();
        for _ in 0..=random(3) {
            let at = random(used);
            damaged[at] = if random(2) == 0 { 0xff } else { damaged[at] ^ 1 << random(8) };
        }
        damaged.truncate(if random(4) == 0 { random(used) } else { used });
        parsed += bodies::log_body(&damaged, count, &geometry());
    }
    assert!(parsed > 10_000, "{parsed}");
}
