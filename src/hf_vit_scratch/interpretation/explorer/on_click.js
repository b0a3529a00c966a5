// Tell the page which patch of a picture was clicked. The view box of its SVG has one unit for each patch.
element.addEventListener('click', event => {
    const picture = event.target.closest('.vit-stack')
    if (!picture) return
    const box = picture.getBoundingClientRect()
    const {width: cols, height: rows} = picture.querySelector('svg').viewBox.baseVal
    const row = Math.floor(rows * (event.clientY - box.top) / box.height)
    const col = Math.floor(cols * (event.clientX - box.left) / box.width)
    trigger('click', {row: 1 + Math.min(Math.max(row, 0), rows - 1), col: 1 + Math.min(Math.max(col, 0), cols - 1)})
})
